"""What kernels and the format share: constants, and how codes are planned."""

from __future__ import annotations

MIX_A = (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)


MIX_B = (0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
"""Of each lane: the multiplier of the word's number, then the two of the mix."""
