"""Every command of every wire, played as nobody, as another tenant, as the tenant and as an administrator."""
