"""Tables of text, CSV and JSON Lines: a sample of each row."""
