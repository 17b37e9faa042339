"""What two or more services need: contracts and adapters, no decisions. If only one service needs it, it lives there."""
