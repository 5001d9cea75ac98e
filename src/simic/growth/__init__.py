"""Networks that grow: slots, seeds, blueprints, incubation, export. No decisions are taken here."""
