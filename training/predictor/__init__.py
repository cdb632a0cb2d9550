"""A predictor's recipe: attention captured in full inference, pairs of history and next step, and the best network."""
