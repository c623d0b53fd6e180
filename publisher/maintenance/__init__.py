"""Retention, anchors, multi-step deltas, repair and operators' orders."""
