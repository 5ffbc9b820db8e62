"""One short operation list per model family, written once for both directions."""
