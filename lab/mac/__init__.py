"""MAC-Attention judged: quality over what is read, beside other methods; what layers reuse; what reuse errs."""
