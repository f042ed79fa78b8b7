"""Spark's data sources over the streams CDC and INIT."""
