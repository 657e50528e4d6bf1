"""The modules that hold measures; importing this one makes all of them known."""

from __future__ import annotations

from intertwine.measure import cca as cca
from intertwine.measure import cka as cka
from intertwine.measure import kernel_cka as kernel_cka
from intertwine.measure import neighbours as neighbours
from intertwine.measure import procrustes as procrustes
from intertwine.measure import r2 as r2
from intertwine.measure import relu_cka as relu_cka
from intertwine.measure import rsa as rsa
from intertwine.measure import soft_matching as soft_matching
