"""Spark's data sources over CDC and INIT."""
