"""Spark job that rebuilds the tables and keeps them current."""
