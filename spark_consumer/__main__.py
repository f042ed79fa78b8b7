"""`python -m spark_consumer` is the command `spark-consumer`."""

from tailrace.launch import spark_consumer

if __name__ == "__main__":
    spark_consumer()
