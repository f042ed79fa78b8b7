"""The job: load tables, then apply changes batch by batch."""
