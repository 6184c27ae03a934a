"""Stores in buckets: S3 and compatible servers, Google Cloud Storage, Azure, through obstore.

Imports modules of `backends`, and the rooms below them.
"""
