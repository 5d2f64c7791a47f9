"""Calls for which there is no plan run as eager, and what they save is offloaded on demand (`on_mismatch="passive"`)."""
