"""The part of ``Output`` for quotas, for connections of tests that have none."""


class Unmetered:
    meter = None
    client_id: str | None = None

    def delay_ms(self, size: int) -> int:
        del size
        return 0

    def set_client_id(self, client_id: str | None) -> None:
        self.client_id = client_id
