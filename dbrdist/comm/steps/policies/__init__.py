"""How a step makes its gradients ready for the update: one policy for each way of averaging them."""
