"""What monitors, load balancers and autoscalers read: whether tasks are being run, and how long a queue will last."""

from .health import health_view
from .scale import Scale, read_scale, scale_view

__all__ = ["Scale", "health_view", "read_scale", "scale_view"]
