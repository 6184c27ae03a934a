"""Stores in buckets: S3 and compatible servers, Google Cloud Storage, Azure, through obstore."""
