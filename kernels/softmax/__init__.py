"""Online softmax and log-sum-exp of rows."""
