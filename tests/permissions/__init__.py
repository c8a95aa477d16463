"""Every command of every protocol, run unauthenticated, as another tenant, as the tenant and as an administrator."""
