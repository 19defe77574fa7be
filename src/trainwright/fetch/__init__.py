"""Files and models from elsewhere, whole or not at all: committed, found again, never fetched twice at once."""
