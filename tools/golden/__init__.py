"""Makes the golden files: small files of every released format, which every later version has to read."""
