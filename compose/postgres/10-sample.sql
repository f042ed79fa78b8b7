-- Two sample tables for development.
CREATE TABLE users (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL,
    email text,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    user_id bigint NOT NULL REFERENCES users,
    amount numeric(12, 2) NOT NULL,
    state text NOT NULL DEFAULT 'new',
    note jsonb
);
INSERT INTO users (name, email)
SELECT 'user ' || n, 'user' || n || '@example.org' FROM generate_series(1, 100) n;
INSERT INTO orders (user_id, amount)
SELECT 1 + n % 100, n * 1.25 FROM generate_series(1, 1000) n;
