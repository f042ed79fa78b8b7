#!/bin/sh
# Creates the publication and the bridge's role, which may only replicate and read.
set -eu
psql -v ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" \
    -v role="$POSTGRES_BRIDGE_USER" -v password="$POSTGRES_BRIDGE_PASSWORD" \
    -v database="$POSTGRES_DB" <<'SQL'
CREATE ROLE :"role" LOGIN REPLICATION PASSWORD :'password';
GRANT CONNECT ON DATABASE :"database" TO :"role";
GRANT pg_read_all_stats TO :"role";
GRANT USAGE ON SCHEMA public TO :"role";
GRANT SELECT ON ALL TABLES IN SCHEMA public TO :"role";
ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO :"role";
CREATE PUBLICATION tailrace FOR ALL TABLES;
SQL
