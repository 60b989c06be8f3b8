//! Actions of keys: those of top, htop and pg_activity.

use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// Intervals that + and - choose from, in seconds.
const INTERVALS: [u64; 6] = [1, 2, 3, 5, 10, 30];

/// The content of the lower half of the screen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Pane {
    /// Tables on the left, conflicts and events on the right.
    #[default]
    Both,
    Tables,
    Events,
    Help,
}

/// The command of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Command {
    Nothing,
    Quit,
}

/// The state of the keyboard.
#[derive(Debug)]
pub(super) struct Keys {
    interval: usize,
    paused: bool,
    refresh: bool,
    selected: usize,
    /// How many subscriptions there are.
    number: usize,
    pane: Pane,
    /// How far the lower half is scrolled.
    scrolled: usize,
}

impl Default for Keys {
    fn default() -> Self {
        Self::new(Duration::from_secs(2))
    }
}

impl Keys {
    pub(super) fn new(interval: Duration) -> Self {
        let interval = INTERVALS.iter().position(|seconds| *seconds >= interval.as_secs());
        Self {
            interval: interval.unwrap_or(INTERVALS.len() - 1),
            paused: false,
            refresh: false,
            selected: 0,
            number: 1,
            pane: Pane::default(),
            scrolled: 0,
        }
    }

    pub(super) fn interval(&self) -> Duration {
        Duration::from_secs(INTERVALS[self.interval])
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    pub(super) fn pane(&self) -> Pane {
        self.pane
    }

    pub(super) fn scrolled(&self) -> usize {
        self.scrolled
    }

    /// Which subscription is shown.
    pub(super) fn selected(&self) -> usize {
        self.selected
    }

    pub(super) fn select(&mut self, index: usize) {
        self.selected = index;
    }

    pub(super) fn set_number(&mut self, number: usize) {
        self.number = number.max(1);
        self.selected = self.selected.min(self.number - 1);
    }

    /// Whether the user wants to see it now.
    pub(super) fn take_refresh(&mut self) -> bool {
        std::mem::take(&mut self.refresh)
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> Command {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c' | 'd') if control => return Command::Quit,
            KeyCode::Char('q') => return Command::Quit,
            KeyCode::Esc if self.pane == Pane::Both => return Command::Quit,
            KeyCode::Esc => self.show(Pane::Both),
            KeyCode::Char('h' | '?') | KeyCode::F(1) => self.toggle(Pane::Help),
            KeyCode::Char('t') => self.toggle(Pane::Tables),
            KeyCode::Char('e') => self.toggle(Pane::Events),
            KeyCode::Char(' ' | 'r') => self.refresh = true,
            KeyCode::Char('p' | 'z') => self.paused = !self.paused,
            KeyCode::Char('+') => self.interval = (self.interval + 1).min(INTERVALS.len() - 1),
            KeyCode::Char('-') => self.interval = self.interval.saturating_sub(1),
            KeyCode::Tab | KeyCode::Right | KeyCode::Char('n') => {
                self.selected = (self.selected + 1) % self.number;
            }
            KeyCode::BackTab | KeyCode::Left => {
                self.selected = (self.selected + self.number - 1) % self.number;
            }
            KeyCode::Down | KeyCode::Char('j') => self.scrolled += 1,
            KeyCode::Up | KeyCode::Char('k') => self.scrolled = self.scrolled.saturating_sub(1),
            KeyCode::PageDown => self.scrolled += 10,
            KeyCode::PageUp => self.scrolled = self.scrolled.saturating_sub(10),
            KeyCode::Home => self.scrolled = 0,
            _ => {}
        }
        Command::Nothing
    }

    fn toggle(&mut self, pane: Pane) {
        self.show(if self.pane == pane { Pane::Both } else { pane });
    }

    fn show(&mut self, pane: Pane) {
        (self.pane, self.scrolled) = (pane, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

    use super::{Command, Keys, Pane};

    fn press(keys: &mut Keys, code: KeyCode) -> Command {
        keys.press(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn keys_do_what_they_do_in_top() {
        let mut keys = Keys::default();
        assert_eq!(keys.interval(), Duration::from_secs(2));
        press(&mut keys, KeyCode::Char('+'));
        assert_eq!(keys.interval(), Duration::from_secs(3));
        for _ in 0..9 {
            press(&mut keys, KeyCode::Char('-'));
        }
        assert_eq!(keys.interval(), Duration::from_secs(1));
        press(&mut keys, KeyCode::Char(' '));
        assert!(keys.take_refresh() && !keys.take_refresh());
        press(&mut keys, KeyCode::Char('p'));
        assert!(keys.is_paused());
        keys.set_number(2);
        press(&mut keys, KeyCode::Tab);
        assert_eq!(keys.selected(), 1);
        press(&mut keys, KeyCode::Tab);
        assert_eq!(keys.selected(), 0);
        press(&mut keys, KeyCode::BackTab);
        assert_eq!(keys.selected(), 1);
        keys.set_number(0);
        assert_eq!(keys.selected(), 0, "it was dropped");
    }

    #[test]
    fn escape_leaves_a_pane_and_then_the_program() {
        let mut keys = Keys::default();
        press(&mut keys, KeyCode::Char('h'));
        assert_eq!(keys.pane(), Pane::Help);
        assert_eq!(press(&mut keys, KeyCode::Esc), Command::Nothing);
        assert_eq!(keys.pane(), Pane::Both);
        assert_eq!(press(&mut keys, KeyCode::Esc), Command::Quit);
        assert_eq!(press(&mut keys, KeyCode::Char('q')), Command::Quit);
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(keys.press(interrupt), Command::Quit);
    }
}
