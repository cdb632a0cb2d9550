"""The reference model's recipe: text and tasks to rows, rows to a model, the model to a Hugging Face folder."""
