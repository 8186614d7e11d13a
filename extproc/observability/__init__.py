"""Makes what an operator reads and loads: the page, alerts, dashboard. Nothing that serves imports it."""
