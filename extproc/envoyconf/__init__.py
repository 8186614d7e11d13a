"""Config -> Envoy bootstrap, as typed envoy_data_plane messages (pure)."""

from extproc.envoyconf.bootstrap import bootstrap, render

__all__ = ["bootstrap", "render"]
