//! `pgapace demo`. Packages have neither test servers nor a downloader, so there it only prints the next
//! steps.

pub(crate) use verb::{DemoArgs, EXAMPLE, HELP, run};

#[cfg(feature = "demo")]
mod verb {
    pub(crate) use ::demo::DemoArgs;

    use crate::error::{Class, Failure, Result};
    use crate::stopping::shutdown::Shutdown;

    pub(crate) const EXAMPLE: &str = "\n  pgapace demo";
    pub(crate) const HELP: &str = "Example:
  pgapace demo --duration 30 --clients 8 --publisher-version 15 --subscriber-version 18";

    pub(crate) fn run(args: &DemoArgs) -> Result<()> {
        let shutdown = Shutdown::on_signals()?;
        let program = std::env::current_exe()
            .map_err(|e| Failure::internal(format!("cannot find the program itself: {e}")))?;
        ::demo::run(args, &program, &|| shutdown.requested()).map_err(|error| {
            let class = match error {
                ::demo::DemoError::TablesDiffer | ::demo::DemoError::Stuck { .. } => Class::Apply,
                _ => Class::Internal,
            };
            Failure::new(class, error.to_string())
        })
    }
}

#[cfg(not(feature = "demo"))]
mod verb {
    use clap::Args;

    use crate::error::{Class, Failure, Result};

    pub(crate) const EXAMPLE: &str = "";
    pub(crate) const HELP: &str = "This build has no demo.";

    /// The arguments of the demo of another build.
    #[derive(Debug, Args)]
    pub(crate) struct DemoArgs {
        #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
        _ignored: Vec<String>,
    }

    pub(crate) fn run(_: &DemoArgs) -> Result<()> {
        let failure = Failure::new(Class::Config, "this build has no demo");
        Err(failure.hint(
            "run \"cargo run --release -- demo\" in a clone of the repository; with servers of your own, \
             begin with \"pgapace check --help\"",
        ))
    }
}
