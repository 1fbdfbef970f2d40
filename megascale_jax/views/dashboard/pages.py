"""All pages, in the order of the navigation."""

from megascale_jax.views.dashboard.overview import OVERVIEW
from megascale_jax.views.dashboard.page import Page

PAGES: tuple[Page, ...] = (OVERVIEW,)
