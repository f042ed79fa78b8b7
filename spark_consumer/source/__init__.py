"""Spark data sources that read the streams CDC and INIT."""
