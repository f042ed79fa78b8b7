"""`python -m spark_consumer` is the command `spark-consumer`."""

from consumer_sdk.launch.commands import spark_consumer

if __name__ == "__main__":
    spark_consumer()
