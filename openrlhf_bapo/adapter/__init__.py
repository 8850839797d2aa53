"""OpenRLHF's seams, one file a seam; the only place that imports openrlhf."""
