"""All pages, in the order of the navigation."""

from megascale_jax.views.dashboard.cube_page import CUBE
from megascale_jax.views.dashboard.heat_page import HEAT_MAP
from megascale_jax.views.dashboard.overview import OVERVIEW
from megascale_jax.views.dashboard.page import Page

PAGES: tuple[Page, ...] = (OVERVIEW, HEAT_MAP, CUBE)
