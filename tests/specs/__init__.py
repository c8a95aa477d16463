"""What the documents of each wire say, statement by statement."""
