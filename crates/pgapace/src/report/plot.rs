//! Curves as SVG, in the colours of the page.

use std::fmt::Write as _;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 180.0;
const LEFT: f64 = 74.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 24.0;
/// Points that are more than this apart, in seconds, are not joined: nothing ran, or nothing happened.
const GAP: f64 = 75.0;

/// A curve, or a layer of a stack.
pub(super) struct Series {
    pub(super) name: String,
    /// Time, in seconds since 1970, and value.
    pub(super) points: Vec<(f64, f64)>,
}

/// The scale of a plot.
struct Scale {
    first: f64,
    last: f64,
    highest: f64,
}

impl Scale {
    fn new(times: impl Iterator<Item = f64>, highest: f64) -> Option<Self> {
        let (mut first, mut last) = (f64::INFINITY, f64::NEG_INFINITY);
        for time in times {
            (first, last) = (first.min(time), last.max(time));
        }
        (last > first).then_some(Self { first, last, highest: highest.max(1.0) })
    }

    fn x(&self, time: f64) -> f64 {
        LEFT + (time - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - value / self.highest * (HEIGHT - TOP - BOTTOM)
    }

    /// Axes with labels.
    fn begin(&self, format: &dyn Fn(f64) -> String) -> String {
        let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">\n");
        for step in 0..=2 {
            let value = self.highest * f64::from(step) / 2.0;
            let y = self.y(value);
            // Writing to a string cannot fail.
            let _ = writeln!(
                svg,
                "<path class=\"axis\" d=\"M{LEFT} {y:.1}H{:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\" \
                 text-anchor=\"end\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                y + 4.0,
                super::html::escaped(&format(value))
            );
        }
        for (time, anchor) in [(self.first, "start"), (self.last, "end")] {
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                self.x(time),
                HEIGHT - 6.0,
                super::html::time(time)
            );
        }
        svg
    }
}

/// Curves of one plot; `None` with fewer than two points.
pub(super) fn curves(series: &[Series], format: &dyn Fn(f64) -> String) -> Option<String> {
    let points = || series.iter().flat_map(|series| &series.points);
    let highest = points().map(|point| point.1).fold(0.0, f64::max);
    let scale = Scale::new(points().map(|point| point.0), highest)?;
    let mut svg = scale.begin(format);
    for (index, series) in series.iter().enumerate() {
        let mut path = String::new();
        let mut before = f64::NEG_INFINITY;
        for (time, value) in &series.points {
            let step = if time - before > GAP { 'M' } else { 'L' };
            let _ = write!(path, "{step}{:.1} {:.1}", scale.x(*time), scale.y(*value));
            before = *time;
        }
        let _ = writeln!(svg, "<path class=\"curve s{index}\" d=\"{path}\"/>");
    }
    svg.push_str("</svg>\n");
    svg.push_str(&legend(series));
    Some(svg)
}

/// Layers on top of each other, up to 100 %. All have the same times.
pub(super) fn stack(series: &[Series]) -> Option<String> {
    let times = || series.iter().flat_map(|series| series.points.iter().map(|point| point.0));
    let scale = Scale::new(times(), 100.0)?;
    let mut svg = scale.begin(&|value| format!("{value:.0} %"));
    let mut below: Vec<f64> = vec![0.0; series.first().map_or(0, |first| first.points.len())];
    for (index, series) in series.iter().enumerate() {
        let lower: Vec<_> = series.points.iter().zip(&below).map(|((t, _), b)| (*t, *b)).collect();
        for ((_, value), below) in series.points.iter().zip(&mut below) {
            *below += value;
        }
        let upper = series.points.iter().zip(&below).map(|((t, _), b)| (*t, *b));
        let corners: Vec<_> = upper
            .chain(lower.into_iter().rev())
            .map(|(time, value)| format!("{:.1},{:.1}", scale.x(time), scale.y(value)))
            .collect();
        let _ = writeln!(svg, "<polygon class=\"f{index}\" points=\"{}\"/>", corners.join(" "));
    }
    svg.push_str("</svg>\n");
    svg.push_str(&legend(series));
    Some(svg)
}

fn legend(series: &[Series]) -> String {
    let names = series.iter().enumerate().map(|(index, series)| {
        format!("<span class=\"t{index}\">■ {}</span> ", super::html::escaped(&series.name))
    });
    format!("<p class=\"legend\">{}</p>\n", names.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::{Series, curves, stack};

    fn series(points: &[(f64, f64)]) -> Series {
        Series { name: "a<b".to_owned(), points: points.to_vec() }
    }

    #[test]
    fn curves_have_gaps_where_nothing_is_known() {
        let plot = curves(&[series(&[(0.0, 1.0), (10.0, 2.0), (500.0, 1.0)])], &|v| v.to_string());
        let plot = plot.unwrap_or_default();
        assert_eq!(plot.matches('M').count() - 3, 2, "{plot}");
        assert!(plot.contains("a&lt;b"), "{plot}");
        assert!(curves(&[series(&[(1.0, 1.0)])], &|v| v.to_string()).is_none());
    }

    #[test]
    fn layers_reach_the_top() {
        let layers = [series(&[(0.0, 40.0), (1.0, 70.0)]), series(&[(0.0, 60.0), (1.0, 30.0)])];
        let plot = stack(&layers).unwrap_or_default();
        assert_eq!(plot.matches("<polygon").count(), 2);
        assert!(plot.contains("74.0,10.0 710.0,10.0"), "{plot}");
    }
}
