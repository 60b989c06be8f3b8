//! Line plots as SVG for the report.

use std::fmt::Write as _;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;
/// Number of grid lines in each direction.
const STEPS: f64 = 5.0;
/// Readable on light and dark backgrounds, and with red-green colour blindness.
const COLOURS: [&str; 4] = ["#0072b2", "#e69f00", "#009e73", "#cc79a7"];

/// One line of a plot.
#[derive(Debug)]
pub(crate) struct Series<'a> {
    pub(crate) name: &'a str,
    pub(crate) points: &'a [(f64, f64)],
}

/// The labels of a plot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Labels<'a> {
    pub(crate) title: &'a str,
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
}

/// Draws all series into one plot; both axes start at zero.
pub(crate) fn plot(labels: Labels<'_>, series: &[Series<'_>]) -> String {
    let points = || series.iter().flat_map(|series| series.points);
    let x_max = nice(points().map(|point| point.0).fold(0.0, f64::max));
    let y_max = nice(points().map(|point| point.1).fold(0.0, f64::max));
    let x = |value: f64| LEFT + value / x_max * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - value / y_max * (HEIGHT - TOP - BOTTOM);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"14\">{}</text>\n",
        escaped(labels.title)
    );
    for step in 0..=5 {
        let share = f64::from(step) / STEPS;
        let (at_x, at_y) = (x(x_max * share), y(y_max * share));
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let _ = write!(
            svg,
            "<path d=\"M{LEFT} {at_y:.1}H{right}M{at_x:.1} {TOP}V{bottom}\" stroke=\"#dddddd\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n\
             <text x=\"{at_x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n",
            LEFT - 6.0,
            at_y + 4.0,
            short(y_max * share),
            bottom + 18.0,
            short(x_max * share),
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
         <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
        LEFT.midpoint(WIDTH - RIGHT),
        HEIGHT - 10.0,
        escaped(labels.x),
        HEIGHT / 2.0,
        escaped(labels.y),
    );
    // Next to the title, where no line is.
    let width = |series: &Series<'_>| 9.0 * series.name.len() as f64 + 20.0;
    let mut legend = WIDTH - RIGHT - series.iter().map(width).sum::<f64>();
    for (one, colour) in series.iter().zip(COLOURS.iter().cycle()) {
        let line: Vec<_> = one
            .points
            .iter()
            .map(|(at, value)| format!("{:.1},{:.1}", x(*at), y(*value)))
            .collect();
        let _ = write!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\n\
             <text x=\"{legend:.1}\" y=\"22\" fill=\"{colour}\" font-weight=\"bold\">{}</text>\n",
            line.join(" "),
            escaped(one.name),
        );
        legend += width(one);
    }
    svg + "</svg>\n"
}

/// Rounds up to a number with the single digit 1, 2 or 5, so that a fifth of it is readable.
fn nice(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0];
    steps.map(|step| step * power).into_iter().find(|nice| *nice >= value).unwrap_or(value)
}

/// Formats a number for an axis.
fn short(value: f64) -> String {
    match value {
        value if value >= 1e9 => format!("{}G", trimmed(value / 1e9)),
        value if value >= 1e6 => format!("{}M", trimmed(value / 1e6)),
        value if value >= 1e3 => format!("{}k", trimmed(value / 1e3)),
        value => trimmed(value),
    }
}

fn trimmed(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!(nice(0.0), 1.0);
        assert_eq!(nice(3.2), 5.0);
        assert_eq!(nice(100.0), 100.0);
        assert_eq!(nice(1234.0), 2000.0);
        assert_eq!(short(1_500_000.0), "1.5M");
        assert_eq!(short(0.4), "0.4");
    }

    #[test]
    fn a_plot_has_every_series() {
        let points = [(0.0, 0.0), (2.0, 1.0)];
        let series = [Series { name: "a<b", points: &points }, Series { name: "c", points: &[] }];
        let svg = plot(Labels { title: "t", x: "s", y: "%" }, &series);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains("a&lt;b") && svg.ends_with("</svg>\n"));
    }
}
