"""Number formats and encodings, and how numbers are rounded to them."""
