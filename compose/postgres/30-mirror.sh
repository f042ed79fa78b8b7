#!/bin/sh
# Creates a second database for the mirror, with its own owner.
set -eu
psql -v ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname postgres \
    -v role="$MIRROR_USER" -v password="$MIRROR_PASSWORD" -v database="$MIRROR_DB" <<'SQL'
CREATE ROLE :"role" LOGIN PASSWORD :'password';
CREATE DATABASE :"database" OWNER :"role";
SQL
