"""One train step: packing, passes, loss, gradients, optimizer."""
