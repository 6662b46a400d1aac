"""Pictures that other code drew, for the evaluation alone: nothing here is ever used in training."""
