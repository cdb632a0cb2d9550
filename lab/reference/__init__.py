"""Train the reference model: text and tasks to rows, rows to a model, the model to a Hugging Face folder."""
