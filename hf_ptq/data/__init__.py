"""Calibration data: documents, chat records and token ids, packed into rows; the loop that runs them."""
