"""memplan.runtime.dynamo: to be described."""
