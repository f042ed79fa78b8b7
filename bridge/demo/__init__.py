"""Embedded servers, a sample workload and the demonstration that runs on them."""
