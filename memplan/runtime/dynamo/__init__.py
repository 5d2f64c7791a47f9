"""`torch.compile(model, backend="memplan")`."""
