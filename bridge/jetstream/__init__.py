"""What the bridge keeps in JetStream: streams, buckets, batches, fence, read back."""
