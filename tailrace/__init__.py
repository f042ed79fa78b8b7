"""Where the commands `bridge`, `cdc` and `spark-consumer` start and end."""
