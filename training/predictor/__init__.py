"""Train a predictor: capture attention in full inference, pair histories with next steps, and keep the best network."""
