"""`genai bench`: how fast, beside what the machine could do, and never a ratio that parity has not vouched for."""
