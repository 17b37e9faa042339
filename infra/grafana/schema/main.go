// Holds dashboards against Grafana's own types (its Foundation SDK, generated from Grafana's schema): every field must be one
// that Grafana knows, of the type and within the bounds that it wants, in panels, their options and their queries. Not held:
// that a word is of the list that Grafana has for it (the SDK's lists are plain strings), and what a browser makes of it all.
//
//	schema FILE…        exit code 0: all hold; 1: what does not, one line each
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/variants"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/table"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

func main() {
	kinds := learn()
	code := 0
	for _, path := range os.Args[1:] {
		raw, err := os.ReadFile(path)
		if err == nil {
			err = check(raw, kinds)
		}
		for _, one := range parts(err) {
			code = 1
			fmt.Printf("%s: %v\n", path, one)
		}
	}
	os.Exit(code)
}

// learn tells the SDK what is in use, and returns the kinds of panels. It lets everything pass in a kind that it was not told.
func learn() map[string]bool {
	runtime := cog.NewRuntime()
	runtime.RegisterDataqueryVariant(prometheus.VariantConfig())
	kinds := map[string]bool{"row": true}
	for _, kind := range []variants.PanelcfgConfig{stat.VariantConfig(), table.VariantConfig(), timeseries.VariantConfig()} {
		runtime.RegisterPanelcfgVariant(kind)
		kinds[kind.Identifier] = true
	}
	return kinds
}

// check returns everything that is wrong, and what the SDK would pass over: a kind of panel or of source without a schema here.
func check(raw []byte, kinds map[string]bool) error {
	var wrong []error
	var outline struct {
		Panels []struct {
			Title   string
			Type    string
			Targets []struct{ Datasource struct{ Type string } }
		}
	}
	if err := json.Unmarshal(raw, &outline); err != nil {
		return err
	}
	for _, panel := range outline.Panels {
		if !kinds[panel.Type] {
			wrong = append(wrong, fmt.Errorf("panel %q: no schema for type %q; name it in infra/grafana/schema/main.go", panel.Title, panel.Type))
		}
		for _, target := range panel.Targets {
			if target.Datasource.Type != "prometheus" {
				wrong = append(wrong, fmt.Errorf("panel %q: no schema for queries of %q", panel.Title, target.Datasource.Type))
			}
		}
	}
	var read, held dashboard.Dashboard
	wrong = append(wrong, parts(read.UnmarshalJSONStrict(raw))...)
	// Read strictly, a panel is looked at and not kept: bounds are those of what is read once more.
	if err := json.Unmarshal(raw, &held); err != nil {
		return errors.Join(append(wrong, err)...)
	}
	return errors.Join(append(wrong, parts(held.Validate())...)...)
}

// parts takes apart an error that is made of several.
func parts(err error) []error {
	var built cog.BuildErrors
	switch joined, many := err.(interface{ Unwrap() []error }); {
	case err == nil:
		return nil
	case many:
		return joined.Unwrap()
	case errors.As(err, &built):
		all := make([]error, 0, len(built))
		for _, one := range built {
			all = append(all, one)
		}
		return all
	}
	return []error{err}
}
