"""Facts of an unusual type in a browser: marked, counted, and hidden by a switch."""


def test_a_switch_hides_facts_of_an_unusual_type(opened):
    page = opened("/facts?top=500&types=false")
    page.wait_for_selector("[data-list][data-ready]")
    rows = page.locator(".fact")
    unusual = page.locator(".fact[data-unusual]")
    number = unusual.count()
    switch = page.locator("[data-unusual-switch]")
    assert switch.is_visible() == (number > 0)
    assert rows.locator(".chip", has_text="unusual type").count() == number
    if number:
        assert page.inner_text("[data-unusual-count]") == str(number)
        switch.locator("input").check()
        assert not unusual.first.is_visible()
        switch.locator("input").uncheck()
        assert unusual.first.is_visible()
