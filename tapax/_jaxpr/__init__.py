"""Analysis, evaluation and rewriting of jaxprs, independent of taps."""
