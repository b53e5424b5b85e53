"""Converters of tables: one sample per row of CSV, JSON Lines, Parquet and Arrow files."""
